"""DVC: versions of data and models."""

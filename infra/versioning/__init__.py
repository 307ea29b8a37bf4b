"""DVC: versions of data and models. Nothing outside this room calls it, or Git."""

"""The stages of SIMoE: instruction tuning that finds sparse experts."""

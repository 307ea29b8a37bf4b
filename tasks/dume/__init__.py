"""The stages of DUME: one seed, its experts, and routers in closed form."""

"""What flows and tasks stand on: settings, recipes, and each service in a room of its own."""

import gc

# Imports make millions of objects that stay. Looked through after every 700th new one, as Python
# does, they take a third longer: seconds of each flow's start, and of each Ray worker's.
gc.set_threshold(50_000)

"""The stages of DeRS: a finished model as one base and light deltas."""

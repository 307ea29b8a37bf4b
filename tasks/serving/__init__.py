"""The engines that a registered version can be served with."""

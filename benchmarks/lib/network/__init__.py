"""A slow link between two network namespaces of this machine."""

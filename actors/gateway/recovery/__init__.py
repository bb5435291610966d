"""What a gateway keeps on disk, so that a restarted one goes on with its open sessions."""

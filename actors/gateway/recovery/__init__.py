"""Open sessions on disk, from which a restarted gateway continues."""

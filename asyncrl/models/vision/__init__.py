"""Models that read images: their image tokens, pixels, and the features of their vision tower."""

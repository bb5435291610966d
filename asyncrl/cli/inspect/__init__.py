"""Commands that look at runs: doctor, engines, watch and samples."""

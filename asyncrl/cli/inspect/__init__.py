"""Commands that inspect runs and this machine: doctor, engines, watch and samples."""

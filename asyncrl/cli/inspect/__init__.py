"""Commands that inspect runs and models: doctor, engines, eval, serve, watch and samples."""

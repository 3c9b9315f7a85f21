"""Train unmodified attention/Mamba hybrids on a prefix forest, exactly."""

"""Where a measured run loses time, against what this GPU and stack should take."""

"""Token generation: plain, and later propose, verify, accept."""

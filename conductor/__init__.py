"""The conductor: a deterministic core, the live shell around it, the cluster's page, replay and simulation."""

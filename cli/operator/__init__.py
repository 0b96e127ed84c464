"""Commands that change a cluster that runs: its policy, its placements, its workers' roles, its stores."""

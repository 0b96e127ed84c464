"""Commands that change a cluster that runs: its policy, its workers' roles, its stores."""

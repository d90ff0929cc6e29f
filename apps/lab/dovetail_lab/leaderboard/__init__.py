"""The leaderboard: every installed scheduler on fixed traces. `board` has the traces and runs,
`results` keeps them, `standings` ranks."""

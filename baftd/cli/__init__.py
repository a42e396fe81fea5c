"""The command `baftd`: one file a verb."""

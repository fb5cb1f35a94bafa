"""The thesis's steps alone, and memory for engines that schedule ready ops themselves."""

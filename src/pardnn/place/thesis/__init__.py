"""The thesis's steps alone, and plans for engines that schedule ready ops themselves."""

"""What capture refuses: errors that name the line, and what to write instead."""

"""What people read: text, pictures, traces."""

"""Plans that cut every op over all devices."""

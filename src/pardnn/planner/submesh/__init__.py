"""Mixed plans: ops cut inside submeshes, pieces and layers placed on submeshes."""

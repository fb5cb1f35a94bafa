"""ATen ops: their schemas, calls as data, host arithmetic, and the ops of partitioned graphs."""

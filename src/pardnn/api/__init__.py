"""The public functions, where all packages meet; `import pardnn` offers them lazily."""

"""Loading and running the target model."""

"""Training of drafters: objectives, anchors, the trainer and its checkpoints."""

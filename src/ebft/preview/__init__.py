"""Rows as the trainers read them, for people: tokens with their labels, anchors, references, in colour or as HTML."""

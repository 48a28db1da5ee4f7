"""What all expanded modules share: the switch, the batch's layout, the registry, the rows that a model holds."""

"""DistCA's data, packings and schedulers: functions of integer arrays. ``tasks`` says what they exchange."""

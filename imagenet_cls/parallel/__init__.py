"""Who am I, how do ranks start, meet, agree and end. Knows nothing of configs, models or data."""

"""What starts things: jobs, sensors, schedules, and the processes that run them unattended."""

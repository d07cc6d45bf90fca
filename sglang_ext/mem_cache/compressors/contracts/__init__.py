"""What a method is: the interfaces, what they check, and where methods register."""

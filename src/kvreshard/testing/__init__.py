"""What ships for users to test with: the slow oracle, the contract that each transport must pass, the ranks behind `kvreshard verify`."""

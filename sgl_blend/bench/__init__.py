"""Speed measurements that users can repeat on their own hardware."""

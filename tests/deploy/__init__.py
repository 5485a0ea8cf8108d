"""The files of deploy/ and cluster.yaml, judged by the programs that read them."""

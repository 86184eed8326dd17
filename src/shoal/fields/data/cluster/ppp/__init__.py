"""ppp: probabilistic partitive partitioning, which finds the number of clusters.

Start reading at ``partition.py``; ``estimator.py`` has the estimator of scikit-learn's style.
"""

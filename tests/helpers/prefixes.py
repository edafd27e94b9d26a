"""The books of a tree of prefixes: what must be true of it, its pools and those who go along it."""
from collections import Counter
from atlas.engine.prefix import ident_of

def nodes_of(tree):
    "All nodes of `tree` that hold a tile"
    todo = [n for root in tree.roots.values() for n in root.children.values()]
    while todo:
        node = todo.pop()
        yield node
        todo += node.children.values()

def check_node(tree, node):
    "What must be true of one node"
    assert not node.gone and node.parent.children[node.key] is node
    assert node.ident==ident_of(node.parent.ident, node.key)
    assert len(node.blocks)==tree.per and all(tree.pool.kept[b] for b in node.blocks)
    if all(map(tree.pool.alone, node.blocks)):
        below = [b for c in node.children.values() for b in c.blocks]
        assert all(map(tree.pool.alone, below)), 'somebody stands on what nobody owns'

def check_pool(pool):
    "What must be true of a pool beside a tree"
    kept = [i for i in range(pool.num_blocks) if pool.kept[i]]
    assert pool.num_kept==len(kept) and all(pool.refs[i]>0 for i in kept)
    assert pool.reclaimable==sum(pool.refs[i]==1 for i in kept)
    assert sorted(pool._free)==[i for i in range(pool.num_blocks) if not pool.refs[i]]

def check_snapshots(tree, found, trails):
    "What must be true of the slots with states"
    slots = [n.snapshot for n in found if n.snapshot is not None]
    assert len(set(slots))==len(slots)==tree.snapshots==tree.states.num_kept
    marked = [slot for t in trails for _,slot in t.marks]
    assert len(set(marked))==len(marked) and not set(marked)&set(slots)
    check_pool(tree.states)

def check_tree(tree, going=()):
    "All of it; `going` are (trail, table) of those who are on their way"
    found = list(nodes_of(tree))
    users = Counter(id(n) for t,_ in going for n in t.path)
    assert len(found)==tree.nodes and tree.pool.num_kept==tree.nodes*tree.per
    for n in found:
        check_node(tree, n)
        assert all(tree.pool.refs[b]==1+users[id(n)] for b in n.blocks)
    for trail,table in going:
        path = [b for n in trail.path for b in n.blocks]
        assert table.blocks[:len(path)]==path and not any(n.gone for n in trail.path)
        assert [n.key for n in trail.path]==trail.keys[:len(trail.path)]
    check_pool(tree.pool)
    if hasattr(tree, 'states'):
        check_snapshots(tree, found, [t for t,_ in going])

def emptied(tree):
    "Nobody is on the way: all of it can be evicted, and nothing is left"
    tree.evict(tree.pool.num_blocks)
    assert not tree.roots and tree.nodes==0
    assert tree.pool.free==tree.pool.num_blocks and not tree.pool.num_kept
    if not hasattr(tree, 'states'):
        return
    assert tree.snapshots==0 and tree.states.free==tree.states.num_blocks

//! Finds the checks of a kernel that can fail in a loop.
//!
//! A failed check ends in a block that traps, or reports and traps. Where a block of a loop
//! branches to one, each iteration computes the check, and the compiler may not move what
//! follows it in front of it.

use std::collections::{BTreeSet, HashMap};

use crate::lines::Lines;

/// A basic block.
#[derive(Debug, Default)]
struct Block {
    /// The blocks that may follow, each with the line that goes there.
    next: Vec<(usize, usize)>,
    /// Whether the block traps.
    traps: bool,
    /// The lines where the block traps under a condition.
    may_trap: Vec<usize>,
}

/// Returns the user's lines of the checks in loops of the kernel `entry`, sorted.
pub(crate) fn in_loops(lines: &Lines<'_>, entry: &str) -> Vec<String> {
    let blocks = blocks(lines.lines(), entry);
    let fatal = fatal(&blocks);
    let mut found = BTreeSet::new();
    for (index, block) in blocks.iter().enumerate() {
        let to_trap = block.next.iter().filter(|(next, _)| fatal[*next]).map(|(_, line)| *line);
        let checks: Vec<usize> = to_trap.chain(block.may_trap.iter().copied()).collect();
        if !checks.is_empty() && is_in_loop(&blocks, index) {
            found.extend(checks.into_iter().filter_map(|line| lines.place(line)));
        }
    }
    found.into_iter().collect()
}

/// Returns the blocks of an entry, in the order of the text.
fn blocks(lines: &[&str], entry: &str) -> Vec<Block> {
    let is_entry = |line: &&str| {
        line.split_once(".entry ")
            .is_some_and(|(_, rest)| rest.split(['(', ' ']).next() == Some(entry))
    };
    let Some(first) = lines.iter().position(is_entry) else { return Vec::new() };
    let end = lines.iter().skip(first).position(|line| line.starts_with("$L__func_end"));
    let body = first..end.map_or(lines.len(), |end| first + end);

    let tables = branch_tables(&lines[body.clone()]);
    // A block starts at a label and after a branch.
    let mut block_at = HashMap::new();
    let (mut jumps, mut blocks) = (Vec::new(), vec![Block::default()]);
    // Whether control flows from the previous line to this one.
    let mut goes_on = true;
    for index in body {
        let line = lines[index];
        let last = blocks.len() - 1;
        if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with("$L__BB")) {
            blocks.push(Block::default());
            if goes_on {
                blocks[last].next.push((last + 1, index));
            }
            block_at.insert(label, last + 1);
            goes_on = true;
            continue;
        }
        let (condition, instruction) = match line.strip_prefix('@') {
            Some(rest) => {
                (true, rest.split_once(char::is_whitespace).map_or("", |(_, i)| i.trim()))
            }
            None => (false, line),
        };
        let is = |name: &str| instruction.starts_with(name);
        if is("trap") && condition {
            blocks[last].may_trap.push(index);
        } else if is("trap") || is("exit") || is("ret") {
            blocks[last].traps |= is("trap");
            if !condition {
                goes_on = false;
                blocks.push(Block::default());
            }
        } else if is("bra") || is("brx") {
            // The last operand is a label, or a table of them.
            let target = instruction.trim_end_matches(';').rsplit([' ', '\t']).next();
            jumps.push((last, index, target.unwrap_or_default()));
            blocks.push(Block::default());
            if condition {
                blocks[last].next.push((last + 1, index));
            }
            goes_on = condition;
        }
    }
    for (from, line, target) in jumps {
        let one = [target];
        let targets = tables.get(target).map_or(&one[..], |table| &table[..]);
        let to = targets.iter().filter_map(|target| block_at.get(target));
        blocks[from].next.extend(to.map(|to| (*to, line)));
    }
    blocks
}

/// Returns the labels of each table of branch targets, by the table's name.
fn branch_tables<'a>(lines: &[&'a str]) -> HashMap<&'a str, Vec<&'a str>> {
    let mut tables: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut table = None;
    for line in lines {
        if let Some(name) = line.strip_suffix(": .branchtargets") {
            table = Some(name);
        } else if let Some(name) = table {
            tables.entry(name).or_default().push(line.trim_end_matches([',', ';']));
            if line.ends_with(';') {
                table = None;
            }
        }
    }
    tables
}

/// Returns for each block whether it always ends in a trap.
fn fatal(blocks: &[Block]) -> Vec<bool> {
    let mut fatal: Vec<bool> = blocks.iter().map(|block| block.traps).collect();
    loop {
        let mut changed = false;
        for (index, block) in blocks.iter().enumerate() {
            let always = !block.next.is_empty() && block.next.iter().all(|(next, _)| fatal[*next]);
            if always && !fatal[index] {
                fatal[index] = true;
                changed = true;
            }
        }
        if !changed {
            return fatal;
        }
    }
}

/// Returns whether control can come back to a block.
fn is_in_loop(blocks: &[Block], index: usize) -> bool {
    let (mut seen, mut next) = (vec![false; blocks.len()], vec![index]);
    while let Some(block) = next.pop() {
        for (to, _) in &blocks[block].next {
            if *to == index {
                return true;
            }
            if !std::mem::replace(&mut seen[*to], true) {
                next.push(*to);
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::in_loops;
    use crate::lines::Lines;

    const PTX: &str = "
.visible .entry other()
{
$L__func_begin0:
	trap;
$L__func_end0:
}
.visible .entry hot(
	.param .u32 hot_param_0
)
{
$L__func_begin1:
	.loc	1 6 5
	setp.eq.b32 	%p1, %r3, 0;
	@%p1 bra 	$L__BB1_6;
	.loc	1 7 9
$L__BB1_2:
	.loc	1 8 13
	setp.gt.u64 	%p2, %rd3, %rd4;
	@%p2 bra 	$L__BB1_3;
	bra.uni 	$L__BB1_5;
$L__BB1_3:
	.loc	1 9 13
	@%p4 trap;
	.loc	1 10 13
	brx.idx 	%r2, $L_brx_0;
	$L_brx_0: .branchtargets
		$L__BB1_2,
		$L__BB1_4;
$L__BB1_4:
	ret;
$L__BB1_5:
	.loc	2 268 9
	mov.b32 	%r1, 0;
$L__BB1_6:
	trap;
$L__func_end1:
}
	.file	1 \"/k/src/lib.rs\"
	.file	2 \"/r/lib/rustlib/src/rust/library/core/src/panicking.rs\"
";

    #[test]
    fn checks_in_loops_are_found_and_those_before_are_not() {
        let lines = Lines::of(PTX);
        assert_eq!(in_loops(&lines, "hot"), ["/k/src/lib.rs:8:13", "/k/src/lib.rs:9:13"]);
        assert!(in_loops(&lines, "other").is_empty() && in_loops(&lines, "ho").is_empty());
    }
}

//! Tables of plans, which `tune` writes and the operations read.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use devcomm::GemmPlan;

use crate::base::output;

/// The key of a shape, `[n, k, m]`, by which tables are sorted.
pub type Key = [usize; 3];

pub fn key([m, n, k]: [usize; 3]) -> Key {
    [n, k, m]
}

/// The key of a table's entry, by which the table is sorted.
pub trait TableKey: Ord + Sized {
    /// Returns the key of an entry's words, and checks the plan after it.
    fn parse(words: &[&str]) -> Result<Self>;
}

impl TableKey for Key {
    fn parse(words: &[&str]) -> Result<Self> {
        let [m, n, k, plan] = *words else { bail!("it is not `m n k plan`") };
        plan.parse::<GemmPlan>()?;
        Ok(key([number(m)?, number(n)?, number(k)?]))
    }
}

pub fn number(word: &str) -> Result<usize> {
    word.parse().with_context(|| format!("`{word}` is not a number"))
}

/// A table of plans. A line is empty or an entry, that is numbers or names and then a plan; a
/// comment follows `#`. This program writes the table, and `plan.rs` of the operation in
/// `crates/ops/src` reads it.
#[derive(Debug, PartialEq, Eq)]
pub struct Table<K> {
    /// The lines that are comments.
    comments: Vec<String>,
    /// The lines with a plan.
    entries: BTreeMap<K, String>,
}

impl Table<Key> {
    /// Returns the plan of this shape.
    pub fn plan(&self, shape: [usize; 3]) -> Option<GemmPlan> {
        let line = self.entries.get(&key(shape))?;
        line.split('#').next()?.split_whitespace().last()?.parse().ok()
    }
}

impl<K: TableKey> Table<K> {
    /// Reads a file, which need not exist.
    pub fn read(path: &Path) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
            text => text.with_context(|| format!("cannot read {}", path.display())),
        };
        Self::parse(&text?).with_context(|| format!("{} is no table of plans", path.display()))
    }

    pub fn parse(text: &str) -> Result<Self> {
        let mut table = Self { comments: Vec::new(), entries: BTreeMap::new() };
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if line.starts_with('#') {
                table.comments.push(line.to_owned());
                continue;
            }
            let (entry, _) = line.split_once('#').unwrap_or((line, ""));
            let words: Vec<_> = entry.split_whitespace().collect();
            let key = K::parse(&words).with_context(|| format!("`{line}`"))?;
            table.entries.insert(key, line.to_owned());
        }
        Ok(table)
    }

    /// Prints an entry, and adds it to the table in a file, if any, as by [`insert`](Self::insert).
    pub fn record(path: Option<&Path>, key: K, line: String, head: String) -> Result<()> {
        println!("{line}");
        let Some(path) = path else { return Ok(()) };
        let mut table = Self::read(path)?;
        table.insert(key, line, head);
        output::write(path, &table.to_string())
    }

    /// Returns whether the table has an entry with this key.
    pub fn has(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    /// Adds an entry, or replaces the one with this key. A table without comments gets `head` as
    /// its first line.
    pub fn insert(&mut self, key: K, line: String, head: String) {
        if self.comments.is_empty() {
            self.comments.push(head);
        }
        self.entries.insert(key, line);
    }
}

/// Comments, and then the sorted entries.
impl<K> fmt::Display for Table<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.comments.iter().chain(self.entries.values()).try_for_each(|line| writeln!(f, "{line}"))
    }
}

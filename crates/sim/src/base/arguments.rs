//! The memory that a launch's arguments refer to: reports name it by the kernel's parameter.

use std::fmt;

use crate::base::owner::Owner;

/// An argument, or a field of one, that refers to memory.
#[derive(Debug)]
struct Argument {
    /// The parameter, such as `out` or `args.out`.
    name: String,
    /// The size of the memory's elements in bytes; not 0.
    element: usize,
    owner: Owner,
    /// The offset of the first element in the owner's memory, in bytes.
    offset: usize,
}

/// The arguments of a launch that refer to memory.
#[derive(Debug, Default)]
pub(crate) struct Arguments(Vec<Argument>);

impl Arguments {
    /// Adds a parameter that refers to byte `offset` of the owner's memory.
    pub(crate) fn add(&mut self, name: String, element: usize, owner: Owner, offset: usize) {
        if element != 0 {
            self.0.push(Argument { name, element, owner, offset });
        }
    }

    /// Returns the argument that refers to byte `offset` of the owner's memory, if one does.
    fn of(&self, owner: Owner, offset: usize) -> Option<&Argument> {
        let refers = |argument: &&Argument| {
            // A window is one argument for the parts of all ranks.
            let is_same = match (argument.owner, owner) {
                (Owner::Window { id, .. }, Owner::Window { id: other, .. }) => id == other,
                (argument, owner) => argument == owner,
            };
            is_same && argument.offset <= offset
        };
        self.0.iter().filter(refers).max_by_key(|argument| argument.offset)
    }

    /// Returns a name of the memory: that of an argument that refers to byte `offset`, if any.
    pub(crate) fn name(&self, owner: Owner, offset: usize) -> impl fmt::Display {
        match self.of(owner, offset) {
            Some(Argument { name, .. }) => format!("`{name}` ({owner})"),
            None => owner.to_string(),
        }
    }

    /// Returns the name of byte `offset` of the owner's memory, if an argument refers to it.
    pub(crate) fn find(&self, owner: Owner, offset: usize) -> Option<String> {
        let Argument { name, element, offset: start, .. } = self.of(owner, offset)?;
        Some(format!("element {} of `{name}` ({owner})", (offset - start) / element))
    }

    /// Returns a name of byte `offset` of the owner's memory.
    pub(crate) fn locate(&self, owner: Owner, offset: usize) -> String {
        self.find(owner, offset).unwrap_or_else(|| format!("byte {offset} of {owner}"))
    }
}

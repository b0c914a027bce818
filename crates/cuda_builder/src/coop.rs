//! Makes the calls through NCCL's cooperative groups inlinable.
//!
//! NCCL's C functions take a group of threads as an `ncclCoopAny`: 16 bytes of state and, at byte
//! 16, a pointer to a constant table of three functions (`thread_rank`, `size`, `sync`). Each use
//! is an indirect call with the group as its only argument. LLVM must assume that such a call keeps
//! or changes the group, so it cannot see that the table is constant, and thousands of indirect
//! calls stay. Marking the argument `captures(none)` and `readonly` at the call removes them all.
//!
//! The marks are promises, so they are proved first, on the bitcode at hand:
//!
//! * every indirect call of one argument reads its target from the table of its own argument, at
//!   one of the three places;
//! * every function that such a call could reach, that is, every function of one argument whose
//!   address NCCL's module takes, only reads through that argument.
//!
//! Bitcode that does not fit is refused: a future NCCL may do something else, and a wrong promise
//! is a wrong program.
//!
//! Functions take groups by value, and LLVM copies what is passed by value when it inlines. Through
//! such a copy it often loses the table again. A function that does nothing but read its group
//! needs no copy; where that is proved, down through everything that it passes the group to, the
//! group is passed as it is.

use std::collections::HashMap;

use crate::llvm::{At, Failure, Function, Instruction, Module, Opcode, Result, Value};

const TABLE_OFFSET: i64 = 16;
const ENTRY_OFFSETS: [i64; 3] = [0, 8, 16];

/// Proves the promises and marks the calls. Returns how many were marked.
pub(crate) fn mark_group_calls(nccl: &Module<'_>) -> Result<usize> {
    let context = nccl.context();
    // `captures` came with LLVM 21; before it, the same promise was called `nocapture`.
    let captures = context.attribute("captures").or_else(|_| context.attribute("nocapture"));
    let (Ok(captures), Ok(readonly)) = (captures, context.attribute("readonly")) else {
        return Err(Failure("this LLVM knows neither `captures` nor `nocapture`".to_owned()));
    };
    let functions = nccl.functions();
    let mut marked = 0;
    for function in &functions {
        for call in function.instructions() {
            if !is_indirect_with_one_argument(call) {
                continue;
            }
            if !calls_own_table(call) {
                return refuse(&format!(
                    "{} has an indirect call that is not one of a cooperative group",
                    function.name()
                ));
            }
            call.add_attribute(At::Argument(0), captures);
            call.add_attribute(At::Argument(0), readonly);
            marked += 1;
        }
    }
    if marked > 0 {
        check_targets(&functions)?;
    }
    Ok(marked)
}

/// LLVM's name of the struct.
const GROUP: &str = "%struct.ncclCoopAny";

/// Passes groups without a copy to the functions that only read them, and copies them word by word
/// elsewhere. Returns to how many parameters.
pub(crate) fn pass_groups_uncopied(nccl: &Module<'_>) -> Result<usize> {
    let by_value = nccl.context().by_value(1)?;
    let functions = nccl.functions();
    let mut readers = Readers::default();
    let mut passed = Vec::new();
    for function in &functions {
        for (index, parameter) in function.parameters().into_iter().enumerate() {
            let at = At::Argument(index as u32);
            let copied = function.attribute_type(at, by_value);
            if copied.is_some_and(|ty| ty.text() == GROUP) && readers.only_reads(parameter) {
                passed.push((function, at));
            }
        }
    }
    for function in &functions {
        for copy in function.instructions().into_iter().filter(|call| copies_group(*call)) {
            copy.split_copy(GROUP_WORDS);
        }
    }
    for (function, at) in &passed {
        function.remove_attribute(*at, by_value);
        for user in function.users() {
            if let Some(call) = user.as_instruction() {
                call.remove_attribute(*at, by_value);
            }
        }
    }
    Ok(passed.len())
}

/// The struct is two words, and the pointer to the table.
const GROUP_WORDS: u64 = 2;
const GROUP_BYTES: i64 = 24;

/// Whether this copies a group to another on the stack. LLVM follows a pointer through a load and a
/// store, and not always through a copy of memory.
fn copies_group(call: Instruction<'_>) -> bool {
    const LENGTH: usize = 2;
    let called = call.call().and_then(|(called, _)| called.as_function());
    let operands = call.operands();
    called.is_some_and(|function| function.name().starts_with("llvm.memcpy."))
        && operands.get(LENGTH).and_then(|length| length.as_integer()) == Some(GROUP_BYTES)
        && operands[0].allocated_type().is_some_and(|ty| ty.text() == GROUP)
}

/// What is known of parameters: whether nothing is written through them, by the function and by all
/// that it calls.
#[derive(Default)]
struct Readers(HashMap<(String, usize), bool>);

impl Readers {
    fn only_reads(&mut self, pointer: Value<'_>) -> bool {
        pointer.users().into_iter().all(|user| {
            let Some(user) = user.as_instruction() else { return false };
            match user.opcode() {
                Opcode::Load => true,
                Opcode::Address => self.only_reads(*user),
                Opcode::Call => self.call_only_reads(user, pointer),
                Opcode::Other => false,
            }
        })
    }

    fn call_only_reads(&mut self, call: Instruction<'_>, pointer: Value<'_>) -> bool {
        let Some((called, arguments)) = call.call() else { return false };
        let operands = call.operands();
        let places = (0..arguments).filter(|place| operands.get(*place) == Some(&pointer));
        let Some(function) = called.as_function() else {
            // One of the group's own functions, which have been checked.
            return is_indirect_with_one_argument(call);
        };
        let name = function.name();
        if name.starts_with("llvm.lifetime.") {
            return true;
        }
        if name.starts_with("llvm.memcpy.") {
            const SOURCE: usize = 1;
            return places.into_iter().all(|place| place == SOURCE);
        }
        if function.is_declaration() {
            return false;
        }
        let parameters = function.parameters();
        places.into_iter().all(|place| {
            let key = (name.clone(), place);
            if let Some(known) = self.0.get(&key) {
                return *known;
            }
            // A function that passes it to itself does nothing else with it thereby.
            self.0.insert(key.clone(), true);
            let reads = parameters.get(place).is_some_and(|parameter| self.only_reads(*parameter));
            self.0.insert(key, reads);
            reads
        })
    }
}

fn refuse<T>(reason: &str) -> Result<T> {
    Err(Failure(format!(
        "this NCCL's device bitcode is not of the form that devcomm knows: {reason}; use an NCCL \
         version from the README's table"
    )))
}

fn is_indirect_with_one_argument(call: Instruction<'_>) -> bool {
    call.call().is_some_and(|(called, arguments)| {
        arguments == 1 && called.as_function().is_none() && !called.is_inline_asm()
    })
}

/// Whether the call's target was loaded from the table that its argument points to.
fn calls_own_table(call: Instruction<'_>) -> bool {
    let target = || {
        let (called, _) = call.call()?;
        let (table, entry) = base_and_offset(loaded_from(called)?);
        let (owner, table_at) = base_and_offset(loaded_from(table)?);
        let (group, group_at) = base_and_offset(*call.operands().first()?);
        Some(
            owner == group && table_at - group_at == TABLE_OFFSET && ENTRY_OFFSETS.contains(&entry),
        )
    };
    target() == Some(true)
}

fn loaded_from(value: Value<'_>) -> Option<Value<'_>> {
    let load = value.as_instruction().filter(|i| i.opcode() == Opcode::Load)?;
    load.operands().first().copied()
}

fn base_and_offset(mut pointer: Value<'_>) -> (Value<'_>, i64) {
    let mut offset = 0;
    while let Some((base, bytes)) = pointer.as_instruction().and_then(Instruction::address) {
        pointer = base;
        offset += bytes;
    }
    (pointer, offset)
}

/// Checks every function that an indirect call of one argument could reach.
fn check_targets(functions: &[Function<'_>]) -> Result<()> {
    let mut reachable = 0;
    for function in functions.iter().filter(|f| !f.is_intrinsic() && address_is_taken(**f)) {
        let [argument] = function.parameters()[..] else {
            continue;
        };
        if function.is_declaration() || !only_read(argument) {
            return refuse(&format!(
                "{} is called through a table and does more than read its argument",
                function.name()
            ));
        }
        reachable += 1;
    }
    if reachable == 0 { refuse("no function is reached through a table") } else { Ok(()) }
}

fn address_is_taken(function: Function<'_>) -> bool {
    let called_only = |user: Value<'_>| {
        let Some(call) = user.as_instruction().filter(|i| i.opcode() == Opcode::Call) else {
            return false;
        };
        call.operands().into_iter().filter(|operand| *operand == **function).count() == 1
            && call.call().is_some_and(|(called, _)| called == **function)
    };
    !function.users().into_iter().all(called_only)
}

/// Whether every use of the pointer is a load through it, at it or at a constant distance.
fn only_read(pointer: Value<'_>) -> bool {
    pointer.users().into_iter().all(|user| {
        let Some(user) = user.as_instruction() else {
            return false;
        };
        match user.opcode() {
            Opcode::Load => true,
            Opcode::Address => user.address().is_some() && only_read(*user),
            _ => false,
        }
    })
}

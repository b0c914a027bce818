//! Makes the calls through NCCL's coops inlinable.
//!
//! NCCL's C functions take a coop (a cooperative group) as an `ncclCoopAny`: 16 bytes of state and,
//! at byte 16, a pointer to a constant table of three functions (`thread_rank`, `size`, `sync`).
//! Each use is an indirect call with the coop as its only argument. LLVM must assume that such a
//! call captures or changes the coop, so it cannot prove that the table is constant, and thousands
//! of indirect calls remain. Marking the argument `captures(none)` and `readonly` at the call
//! removes them all.
//!
//! The attributes are assumptions, so they are proved first, on the actual bitcode:
//!
//! * every indirect call with one argument loads its target from the table of that argument, at one
//!   of the three offsets;
//! * every function that such a call could reach, that is, every one-argument function whose
//!   address NCCL's module takes, only reads through that argument.
//!
//! Other bitcode is refused: a future NCCL may differ, and a wrong assumption is a miscompilation.
//!
//! Functions take coops by value, and LLVM copies a by-value argument when it inlines. Through such
//! a copy it often loses track of the table. A function that only reads its coop needs no copy;
//! where that is proved, transitively through all calls that it passes the coop to, the coop is
//! passed by pointer.

use std::collections::HashSet;
use std::hash::Hash;

use crate::llvm::{AttributePlace, Failure, Function, Instruction, Module, Opcode, Result, Value};

const TABLE_OFFSET: i64 = 16;
const ENTRY_OFFSETS: [i64; 3] = [0, 8, 16];

/// Proves the assumptions and marks the calls. Returns the number of marked calls.
pub(crate) fn mark_coop_calls(nccl: &Module<'_>) -> Result<usize> {
    let context = nccl.context();
    // `captures` is new in LLVM 21; before, the attribute was `nocapture`.
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
                    "{} has an indirect call that is not one of a coop",
                    function.name()
                ));
            }
            call.add_attribute(AttributePlace::Argument(0), captures);
            call.add_attribute(AttributePlace::Argument(0), readonly);
            marked += 1;
        }
    }
    if marked > 0 {
        check_targets(&functions)?;
    }
    Ok(marked)
}

/// LLVM's name of the struct.
const COOP: &str = "%struct.ncclCoopAny";

/// Passes coops by pointer to functions that only read them, and splits the `memcpy` of a coop into
/// loads and stores. Returns the number of changed parameters.
pub(crate) fn pass_coops_by_pointer(nccl: &Module<'_>) -> Result<usize> {
    // Only the attribute's kind is used, whatever the size.
    let by_value = nccl.context().by_value(1)?;
    let functions = nccl.functions();
    let mut readers = ReadOnly(HashSet::new());
    let mut passed = Vec::new();
    for function in &functions {
        for (index, parameter) in function.parameters().into_iter().enumerate() {
            let at = AttributePlace::Argument(index as u32);
            let copied = function.attribute_type(at, by_value);
            if copied.is_some_and(|ty| ty.text() == COOP) && readers.has(parameter, passed_to) {
                passed.push((function, at));
            }
        }
    }
    for function in &functions {
        for copy in function.instructions().into_iter().filter(|call| copies_coop(*call)) {
            copy.split_copy(COOP_WORDS);
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

/// The struct is two 64-bit words and the pointer to the table.
const COOP_WORDS: u64 = 2;
const COOP_BYTES: i64 = 24;

/// Returns whether this is a `memcpy` of a coop to the stack. LLVM follows a pointer through a load
/// and a store, but not always through a `memcpy`.
fn copies_coop(call: Instruction<'_>) -> bool {
    const LENGTH: usize = 2;
    let called = call.call().and_then(|(called, _)| called.as_function());
    let operands = call.operands();
    called.is_some_and(|function| function.name().starts_with("llvm.memcpy."))
        && operands.get(LENGTH).and_then(|length| length.as_integer()) == Some(COOP_BYTES)
        && operands[0].allocated_type().is_some_and(|ty| ty.text() == COOP)
}

/// Parameters that their functions only read, and so do all functions to which they pass them.
struct ReadOnly<P>(HashSet<P>);

impl<P: Clone + Eq + Hash> ReadOnly<P> {
    /// Returns whether a parameter is one of these. `passed_to` returns the parameters as which a
    /// function passes its parameter on, or `None` if it does more than read it.
    fn has(&mut self, parameter: P, passed_to: impl Fn(&P) -> Option<Vec<P>>) -> bool {
        let mut reached = HashSet::from([parameter.clone()]);
        let mut next = vec![parameter];
        while let Some(parameter) = next.pop() {
            let Some(passed) = passed_to(&parameter) else { return false };
            // A recursive call reaches nothing else.
            let new = passed.into_iter().filter(|to| !self.0.contains(to));
            next.extend(new.filter(|to| reached.insert(to.clone())));
        }
        self.0.extend(reached);
        true
    }
}

/// Returns the parameters as which the uses of a pointer pass it on; `None` if one of them does
/// more than read it.
fn passed_to<'m>(pointer: &Value<'m>) -> Option<Vec<Value<'m>>> {
    let mut passed = Vec::new();
    for user in pointer.users() {
        let user = user.as_instruction()?;
        match user.opcode() {
            Opcode::Load => {}
            Opcode::Address => passed.extend(passed_to(&user)?),
            Opcode::Call => passed.extend(passed_by(user, pointer)?),
            Opcode::FloatCast | Opcode::Other => return None,
        }
    }
    Some(passed)
}

/// Returns the parameters as which a call passes a pointer on; `None` if it may do more than read.
fn passed_by<'m>(call: Instruction<'m>, pointer: &Value<'m>) -> Option<Vec<Value<'m>>> {
    let (called, arguments) = call.call()?;
    let operands = call.operands();
    let mut indices = (0..arguments).filter(|index| operands.get(*index) == Some(pointer));
    let Some(function) = called.as_function() else {
        // A function of the coop's table: `check_targets` has checked them.
        return is_indirect_with_one_argument(call).then(Vec::new);
    };
    let name = function.name();
    if name.starts_with("llvm.lifetime.") {
        return Some(Vec::new());
    }
    if name.starts_with("llvm.memcpy.") {
        const SOURCE: usize = 1;
        return indices.all(|index| index == SOURCE).then(Vec::new);
    }
    if function.is_declaration() {
        return None;
    }
    let parameters = function.parameters();
    indices.map(|index| parameters.get(index).copied()).collect()
}

fn refuse<T>(reason: &str) -> Result<T> {
    Err(Failure(format!(
        "this NCCL's device bitcode is not of the form that devcomm knows: {reason}; use the \
         NCCL that `devcomm setup` downloads"
    )))
}

fn is_indirect_with_one_argument(call: Instruction<'_>) -> bool {
    call.call().is_some_and(|(called, arguments)| {
        arguments == 1 && called.as_function().is_none() && !called.is_inline_asm()
    })
}

/// Returns whether the call's target was loaded from the table that its argument points to.
fn calls_own_table(call: Instruction<'_>) -> bool {
    let target = || {
        let (called, _) = call.call()?;
        let (table, entry) = base_and_offset(loaded_from(called)?);
        let (owner, table_at) = base_and_offset(loaded_from(table)?);
        let (coop, coop_at) = base_and_offset(*call.operands().first()?);
        Some(owner == coop && table_at - coop_at == TABLE_OFFSET && ENTRY_OFFSETS.contains(&entry))
    };
    target() == Some(true)
}

fn loaded_from(value: Value<'_>) -> Option<Value<'_>> {
    let load = value.as_instruction().filter(|i| i.opcode() == Opcode::Load)?;
    load.operands().first().copied()
}

/// Returns the pointer to which constant offsets are added to give this one, and their sum in
/// bytes.
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

/// Returns whether a function is used other than as the callee of direct calls.
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

/// Returns whether every use of the pointer is a load through it, at a constant offset.
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::ReadOnly;

    /// Returns which parameters are only read, asked for one after the other: `b` and `c` pass
    /// theirs to each other, `c` also to `a`, which stores to it; `d` and `e` only to each other.
    fn are_read_only(asked: &[&'static str]) -> Vec<bool> {
        let mut readers = ReadOnly(HashSet::new());
        let passed_to = |parameter: &&str| match *parameter {
            "a" => None,
            "b" => Some(vec!["c"]),
            "c" => Some(vec!["b", "a"]),
            "d" => Some(vec!["e", "d"]),
            _ => Some(vec!["d"]),
        };
        asked.iter().map(|parameter| readers.has(*parameter, passed_to)).collect()
    }

    #[test]
    fn functions_that_call_each_other_only_read_a_parameter_if_all_of_them_do() {
        assert_eq!(are_read_only(&["b", "c", "b", "a"]), [false; 4]);
        assert_eq!(are_read_only(&["c", "b"]), [false; 2]);
        assert_eq!(are_read_only(&["d", "e", "d"]), [true; 3]);
    }
}

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

use crate::llvm::{At, Failure, Function, Instruction, Module, Opcode, Result, Value};

const TABLE_OFFSET: i64 = 16;
const ENTRY_OFFSETS: [i64; 3] = [0, 8, 16];

/// Proves the promises and marks the calls. Returns how many were marked.
pub(crate) fn mark_group_calls(nccl: &Module<'_>) -> Result<usize> {
    let context = nccl.context();
    // `captures` came with LLVM 21; before it, the same promise was called `nocapture`.
    let captures = context.attribute("captures").or_else(|| context.attribute("nocapture"));
    let (Some(captures), Some(readonly)) = (captures, context.attribute("readonly")) else {
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
            call.add_attribute(At::FirstArgument, captures);
            call.add_attribute(At::FirstArgument, readonly);
            marked += 1;
        }
    }
    if marked > 0 {
        check_targets(&functions)?;
    }
    Ok(marked)
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

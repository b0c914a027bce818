//! Marks the functions that kernels call `alwaysinline`.
//!
//! A call on a GPU costs a stack frame, moves arrays to local memory, and hides the caller's
//! constants. So every function of a kernel package and of its dependencies is inlined, without an
//! attribute in its source. These functions are not marked:
//!
//! * those with `#[inline(never)]` or `#[cold]`, which their authors chose;
//! * those of Rust's standard library, whose authors chose for each: formatting, for example, has
//!   large functions that are called from many places;
//! * NCCL's, which clang has marked.
//!
//! A function that calls itself cannot be inlined. A cycle of calls is an error, unless it has a
//! function with `#[inline(never)]`, which keeps its call.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::llvm::{AttributePlace, Context, Failure, Function, Module, Result};
use crate::names::demangled;

/// Marks the functions of a module of Rust, before NCCL's are linked.
pub(crate) fn mark(module: &Module<'_>) -> Result<()> {
    let context = module.context();
    let inline = context.attribute("alwaysinline")?;
    let defined = || module.functions().into_iter().filter(|one| !one.is_declaration());
    let mut marked = HashSet::new();
    for function in defined() {
        if function.is_of_user() && may_inline(context, function)? {
            function.add_attribute(AttributePlace::Function, inline);
            marked.insert(function.name());
        }
    }
    let never = context.attribute("noinline")?;
    let calls = defined().filter(|one| !one.has_attribute(AttributePlace::Function, never));
    let calls = calls.map(|function| (function.name(), Calls::of(function))).collect();
    match cycle(calls, &marked) {
        None => Ok(()),
        Some(cycle) => Err(Failure(cycle)),
    }
}

/// Inlines functions with one caller, regardless of size, such as NCCL's closure of an LL
/// all-to-all.
pub(crate) fn mark_single_callers(module: &Module<'_>) -> Result<()> {
    let inline = module.context().attribute("alwaysinline")?;
    for function in module.functions() {
        let is_ours = !function.is_declaration() && function.is_called_once();
        if is_ours && may_inline(module.context(), function)? {
            function.add_attribute(AttributePlace::Function, inline);
        }
    }
    Ok(())
}

/// Returns whether a function is neither a kernel nor `#[inline(never)]` nor `#[cold]`.
fn may_inline(context: &Context<'_>, function: Function<'_>) -> Result<bool> {
    let has = |name| {
        let attribute = context.attribute(name)?;
        Ok(function.has_attribute(AttributePlace::Function, attribute))
    };
    Ok(!function.is_kernel() && !has("noinline")? && !has("cold")?)
}

/// The functions that a function calls, each with the line of the first call.
struct Calls(Vec<(String, Option<String>)>);

impl Calls {
    fn of(function: Function<'_>) -> Self {
        let mut seen = HashSet::new();
        let mut calls = Vec::new();
        for instruction in function.instructions() {
            let called = instruction.call().and_then(|(called, _)| called.as_function());
            if let Some(name) = called.map(|called| called.name())
                && seen.insert(name.clone())
            {
                calls.push((name, instruction.place()));
            }
        }
        Self(calls)
    }
}

/// Returns the message for a shortest cycle of calls through a marked function, if there is one.
fn cycle(mut calls: HashMap<String, Calls>, marked: &HashSet<String>) -> Option<String> {
    // A function that calls none of those that are left is in no cycle.
    loop {
        let left: HashSet<String> = calls.keys().cloned().collect();
        calls.retain(|_, calls| {
            calls.0.retain(|(called, _)| left.contains(called));
            !calls.0.is_empty()
        });
        if calls.len() == left.len() {
            break;
        }
    }
    let mut starts: Vec<&String> = calls.keys().filter(|name| marked.contains(*name)).collect();
    starts.sort();
    let cycles = starts.into_iter().filter_map(|start| path_back(&calls, start));
    let shortest = cycles.min_by_key(Vec::len)?;
    let mut text = String::new();
    for (name, place) in &shortest {
        let at = place.as_ref().map_or(String::new(), |place| format!(" at {place}"));
        text += &format!("`{}`{at} calls ", demangled(name));
    }
    let (first, _) = shortest.first()?;
    Some(format!(
        "recursion: {text}`{}`; functions of a kernel are inlined, so write a loop, or mark one of \
         them `#[inline(never)]`: each of its calls then takes a stack frame in local memory",
        demangled(first)
    ))
}

/// Returns a shortest path of calls from a function to itself: each caller with the line of its
/// call.
fn path_back<'a>(
    calls: &'a HashMap<String, Calls>,
    start: &'a str,
) -> Option<Vec<(&'a str, &'a Option<String>)>> {
    let mut callers: HashMap<&str, (&str, &Option<String>)> = HashMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(caller) = next.pop_front() {
        for (called, place) in calls.get(caller).into_iter().flat_map(|calls| &calls.0) {
            if !callers.contains_key(called.as_str()) {
                callers.insert(called, (caller, place));
                next.push_back(called);
            }
        }
    }
    let mut path = vec![*callers.get(start)?];
    while path.last()?.0 != start {
        path.push(callers[path.last()?.0]);
    }
    path.reverse();
    Some(path)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{Calls, cycle};

    fn cycle_of(edges: &[(&str, &str)], marked: &[&str]) -> Option<String> {
        let mut calls: HashMap<String, Calls> = HashMap::new();
        for (caller, called) in edges {
            let entry = calls.entry((*caller).to_owned()).or_insert(Calls(Vec::new()));
            entry.0.push(((*called).to_owned(), Some(format!("{caller}.rs:1:1"))));
        }
        cycle(calls, &marked.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn the_shortest_cycle_through_a_marked_function_is_named_with_its_lines() {
        let edges = [("k", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("b", "a"), ("c", "d")];
        let found = cycle_of(&edges, &["a", "b", "c", "d"]).unwrap();
        assert!(found.contains("`a` at a.rs:1:1 calls `b` at b.rs:1:1 calls `a`;"), "{found}");
    }

    #[test]
    fn a_cycle_of_the_standard_library_alone_and_a_tree_of_calls_are_no_recursion() {
        assert_eq!(cycle_of(&[("a", "s"), ("s", "s")], &["a"]), None);
        assert_eq!(cycle_of(&[("a", "b"), ("a", "c"), ("b", "c")], &["a", "b", "c"]), None);
        assert!(cycle_of(&[("a", "s"), ("s", "a")], &["a"]).is_some());
    }
}

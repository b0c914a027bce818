//! Compares the checked-in list of NCCL's C functions with the bitcode.

use cuda_builder::{Signature, SignatureParam};

use super::list::{Function, Param};
use super::types;

/// Returns the differences between the list and the bitcode's functions; empty if equal.
///
/// Compares names, numbers of parameters, LLVM types of parameters and results, and, where the
/// bitcode has the size of a struct behind a pointer, the size of the project's struct.
pub fn differences(list: &[Function], bitcode: &[Signature]) -> Vec<String> {
    let mut found = Vec::new();
    for function in list {
        let name = &function.name;
        if list.iter().filter(|other| other.name == *name).count() > 1 {
            found.push(format!("{name} is on the list twice"));
        }
        match bitcode.iter().find(|signature| signature.name == *name) {
            Some(signature) => compare(function, signature, &mut found),
            None => found.push(format!("{name} is not in the bitcode")),
        }
    }
    for signature in bitcode {
        if !list.iter().any(|function| function.name == signature.name) {
            found.push(format!("{} is not on the list", signature.name));
        }
    }
    found
}

fn compare(function: &Function, signature: &Signature, found: &mut Vec<String>) {
    let name = &function.name;
    let returns = function.returns.as_deref().map_or(Some("void"), types::llvm_of_rust);
    if returns != Some(signature.returns.as_str()) {
        let ours = function.returns.as_deref().unwrap_or("()");
        found.push(format!("{name} returns `{ours}`, in the bitcode `{}`", signature.returns));
    }
    let (ours, nccls) = (&function.params, &signature.params);
    if ours.len() != nccls.len() {
        found.push(format!("{name} has {} parameters, in the bitcode {}", ours.len(), nccls.len()));
    }
    for (param, nccl) in ours.iter().zip(nccls) {
        if let Some(fault) = compare_param(param, nccl) {
            found.push(format!("{name}: {}: {fault}", param.name));
        }
    }
}

fn compare_param(param: &Param, nccl: &SignatureParam) -> Option<String> {
    let Param { ty, .. } = param;
    if types::llvm_of_rust(ty) != Some(nccl.ty.as_str()) {
        return Some(format!("`{ty}` is `{}` in the bitcode", nccl.ty));
    }
    let sizes = [
        nccl.by_value.as_ref().map(|by_value| (by_value.size, by_value.name.as_str())),
        nccl.dereferenceable.map(|size| (size, "what it refers to")),
    ];
    for (size, what) in sizes.into_iter().flatten() {
        if types::pointee_size(ty) != Some(size) {
            return Some(format!("`{ty}` is not a pointer to {size} bytes, the size of {what}"));
        }
    }
    if nccl.by_value.is_some() && !ty.starts_with("*const ") {
        return Some(format!("`{ty}` is a copy that the callee may not write"));
    }
    None
}

#[cfg(test)]
mod tests {
    use cuda_builder::ByValue;

    use super::*;
    use crate::raw::list::{FAMILIES, OPENING, parse};

    fn signature() -> Signature {
        let param =
            |ty: &str| SignatureParam { ty: ty.to_owned(), by_value: None, dereferenceable: None };
        Signature {
            name: "ncclF".to_owned(),
            params: vec![
                SignatureParam { dereferenceable: Some(248), ..param("ptr") },
                SignatureParam {
                    by_value: Some(ByValue { name: "ncclTeam".to_owned(), size: 12 }),
                    ..param("ptr")
                },
                param("i32"),
            ],
            returns: "i64".to_owned(),
        }
    }

    fn differences_of(function: &str) -> Vec<String> {
        let list = parse(&format!("{OPENING}{function}\n{FAMILIES}}}\n")).unwrap();
        differences(&list, &[signature()])
    }

    #[test]
    fn a_list_of_the_bitcodes_types_has_no_differences() {
        let same = "fn ncclF(comm: *const DevComm, team: *const Team, rank: i32) -> u64;";
        assert_eq!(differences_of(same), Vec::<String>::new());
    }

    #[test]
    fn each_difference_is_named() {
        let wrong = [
            ("fn ncclG();", "ncclG is not in the bitcode"),
            ("", "ncclF is not on the list"),
            ("fn ncclF(comm: *const DevComm, team: *const Team) -> u64;", "2 parameters"),
            (
                "fn ncclF(comm: *const DevComm, team: *const Team, rank: u64) -> u64;",
                "`u64` is `i32`",
            ),
            ("fn ncclF(comm: *const DevComm, team: i64, rank: i32) -> u64;", "`i64` is `ptr`"),
            ("fn ncclF(comm: *const Team, team: *const Team, rank: i32) -> u64;", "248 bytes"),
            (
                "fn ncclF(comm: *const DevComm, team: *const Gin, rank: i32) -> u64;",
                "12 bytes, the size of ncclTeam",
            ),
            ("fn ncclF(comm: *const DevComm, team: *mut Team, rank: i32) -> u64;", "may not write"),
            ("fn ncclF(comm: *const DevComm, team: *const Team, rank: i32);", "returns `()`"),
            (
                "fn ncclF(comm: *const DevComm, team: *const Team, rank: New) -> u64;",
                "`New` is `i32`",
            ),
        ];
        for (function, message) in wrong {
            let found = differences_of(function);
            assert!(found.iter().any(|text| text.contains(message)), "{function}: {found:?}");
        }
        let same = "fn ncclF(comm: *const DevComm, team: *const Team, rank: i32) -> u64;";
        assert!(differences_of(&format!("{same}\n{same}"))[0].contains("twice"));
    }
}

//! Maps NCCL's C types to Rust types, and Rust types to LLVM types.

use std::mem::size_of;

use devcomm_types::nccl;

/// C types that are passed unchanged, and their Rust types. Enums are C's integers.
const SCALARS: [(&str, &str); 35] = [
    ("void", "c_void"),
    ("bool", "bool"),
    ("int", "i32"),
    ("unsigned", "u32"),
    ("size_t", "usize"),
    ("int8_t", "i8"),
    ("uint8_t", "u8"),
    ("int32_t", "i32"),
    ("uint32_t", "u32"),
    ("int64_t", "i64"),
    ("uint64_t", "u64"),
    ("half", "f16"),
    ("float", "f32"),
    ("double", "f64"),
    ("__nv_bfloat16", "bf16"),
    ("__nv_fp8_e4m3", "F8E4M3"),
    ("__nv_fp8_e5m2", "F8E5M2"),
    ("ncclWindow_t", "*mut c_void"),
    ("ncclDevResourceHandle", "ResourceHandle"),
    ("ncclDevResourceHandle_t", "ResourceHandle"),
    ("ncclGinSignal_t", "u32"),
    ("ncclGinCounter_t", "u32"),
    ("ncclCftLeId", "u32"),
    ("ncclResult_t", "i32"),
    ("ncclGinSignalOp_t", "i32"),
    ("ncclGinSignalType", "i32"),
    ("ncclGinSegmentType_t", "i32"),
    ("ncclGinFenceLevel", "i32"),
    ("ncclGinResourceSharingMode", "u8"),
    ("cuda::memory_order", "i32"),
    ("cuda::thread_scope", "i32"),
    // These are always behind a pointer.
    ("ncclLsaBarrierSession_C", "LsaBarrierSession"),
    ("ncclGinBarrierSession_C", "GinBarrierSession"),
    ("ncclBarrierSession_C", "BarrierSession"),
    ("ncclGinDescriptorSmem", "GinDescriptorSmem"),
];

/// C structs, their Rust types, and their sizes in bytes.
const STRUCTS: [(&str, &str, usize); 9] = [
    ("ncclTeam", "Team", size_of::<nccl::Team>()),
    ("ncclTeam_t", "Team", size_of::<nccl::Team>()),
    ("ncclDevComm", "DevComm", size_of::<nccl::DevComm>()),
    ("ncclCoopAny", "CoopAny", size_of::<nccl::CoopAny>()),
    ("ncclMultimemHandle", "MultimemHandle", size_of::<nccl::MultimemHandle>()),
    ("ncclLsaBarrierHandle", "LsaBarrierHandle", size_of::<nccl::LsaBarrierHandle>()),
    ("ncclGinBarrierHandle", "GinBarrierHandle", size_of::<nccl::GinBarrierHandle>()),
    ("ncclGin_C", "Gin", size_of::<nccl::Gin>()),
    ("ncclGinRequest_t", "GinRequest", size_of::<nccl::GinRequest>()),
];

/// Returns the Rust type of a parameter or result, for a C type in the form in which the headers'
/// parser returns it: `const` after what it qualifies, no space before `*` or `&`. A struct by
/// value is a pointer to a copy.
pub fn rust_of_c(ty: &str) -> Option<String> {
    let scalar = |ty: &str| SCALARS.iter().find(|(c, _)| *c == ty).map(|(_, rust)| *rust);
    let struct_type = |ty: &str| STRUCTS.iter().find(|(c, ..)| *c == ty).map(|(_, rust, _)| *rust);
    let any = |ty: &str| scalar(ty).or_else(|| struct_type(ty));
    if let Some(pointee) = ty.strip_suffix(" const*").or_else(|| ty.strip_suffix(" const&")) {
        return any(pointee).map(|rust| format!("*const {rust}"));
    }
    if let Some(pointee) = ty.strip_suffix('*') {
        return any(pointee).map(|rust| format!("*mut {rust}"));
    }
    struct_type(ty).map(|rust| format!("*const {rust}")).or_else(|| scalar(ty).map(str::to_owned))
}

/// Returns the LLVM type of a Rust type in the generated list of functions.
pub fn llvm_of_rust(ty: &str) -> Option<&'static str> {
    Some(match ty {
        "bool" => "i1",
        "i8" | "u8" => "i8",
        "i32" | "u32" | "ResourceHandle" => "i32",
        "i64" | "u64" | "usize" => "i64",
        _ if ty.starts_with("*const ") || ty.starts_with("*mut ") => "ptr",
        _ => return None,
    })
}

/// Returns the size of what a pointer in the generated list points to, if it is a struct of NCCL's.
pub fn pointee_size(ty: &str) -> Option<u64> {
    let pointee = ty.strip_prefix("*const ").or_else(|| ty.strip_prefix("*mut "))?;
    STRUCTS.iter().find(|(_, rust, _)| *rust == pointee).map(|(.., size)| *size as u64)
}

/// Returns whether a function returns a struct of NCCL's; `returns` is
/// [`Signature::returns`](cuda_builder::Signature::returns), which has a struct's name in C.
pub fn is_struct(returns: &str) -> bool {
    returns.starts_with("nccl")
}

#[cfg(test)]
mod tests {
    use super::{llvm_of_rust, pointee_size, rust_of_c};

    #[test]
    fn a_struct_by_value_is_a_pointer_to_a_copy() {
        for ty in ["ncclTeam", "ncclTeam const*", "ncclTeam const&"] {
            assert_eq!(rust_of_c(ty).as_deref(), Some("*const Team"));
        }
        assert_eq!(rust_of_c("ncclGin_C*").as_deref(), Some("*mut Gin"));
        assert_eq!(
            (llvm_of_rust("*const Team"), pointee_size("*const Team")),
            (Some("ptr"), Some(12))
        );
    }

    #[test]
    fn a_type_that_the_table_lacks_is_not_guessed() {
        assert_eq!(rust_of_c("ncclNewThing*"), None);
        assert_eq!(llvm_of_rust("NewThing"), None);
    }
}

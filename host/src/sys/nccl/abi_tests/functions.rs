//! Compares the function table with the headers and the library: every prototype, every name.

use std::collections::BTreeSet;
use std::fs::File;

use object::read::ReadCache;
use object::{Object, ObjectSymbol};

use super::{compile, include, skip};
use crate::communicator::Library;
use crate::sys::nccl::DEV_COMM_VERSION;
use devcomm_sys::nccl::PROTOTYPES;

/// Functions that the library exports or the headers declare but the table omits, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("ncclCftBarrierCreateRequirement", "declared, but not exported"),
    ("ncclGinInboxA2ACreateRequirement", "declared for Windows only, with types that are private"),
    ("ncclGinOutboxCreateRequirement", "declared for Windows only, with types that are private"),
    ("ncclResetDebugInitInternal", "exported, but declared nowhere"),
];

/// Returns the C type that corresponds to a Rust type of the table.
fn c_type(rust: &str) -> String {
    // `stringify!` writes pointers with a space or without.
    let rust = &rust.trim().replace("* ", "*");
    if let Some(target) = rust.strip_prefix("*mut ") {
        return c_type(target) + " *";
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        return c_type(target) + " const *";
    }
    let name = match rust.as_str() {
        "()" => "void",
        "c_void" => "void",
        "c_char" => "char",
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "usize" => "size_t",
        "i8" => "int8_t",
        "i16" => "int16_t",
        "i32" => "int32_t",
        "i64" => "int64_t",
        "u8" => "uint8_t",
        "u16" => "uint16_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "RawComm" => "ncclComm_t",
        "RawWindow" => "ncclWindow_t",
        "RawStream" => "cudaStream_t",
        "RawUniqueId" => "ncclUniqueId",
        "RawWaitSignal" => "ncclWaitSignalDesc_t",
        "ParamHandle" => "ncclParamHandle_t",
        "Config" => "ncclConfig_t",
        "CollConfig" => "ncclCollConfig_t",
        "CommProperties" => "ncclCommProperties_t",
        "EncryptionConfig" => "ncclEncryptionConfig_t",
        "SimInfo" => "ncclSimInfo_t",
        "Requirements" => "ncclDevCommRequirements_t",
        "ResourceRequirements" => "ncclDevResourceRequirements_t",
        "DevComm" => "ncclDevComm_t",
        "Team" => "ncclTeam_t",
        "MultimemHandle" => "ncclMultimemHandle_t",
        "LsaBarrierHandle" => "ncclLsaBarrierHandle_t",
        "GinBarrierHandle" => "ncclGinBarrierHandle_t",
        "LlA2aHandle" => "ncclLLA2AHandle_t",
        other => panic!("no C type is known for {other}"),
    };
    name.to_owned()
}

/// Enumerations are ints in Rust; every other type must be identical, `const` behind pointers
/// included.
const INTS: &str = "template <class T, bool = std::is_enum_v<T>> struct Int { using type = T; };
template <class T> struct Int<T, true> {
  static_assert(sizeof(T) == sizeof(int));
  using type = std::conditional_t<std::is_const_v<T>, const int, int>;
};
template <class T> struct Int<T *, false> { using type = typename Int<T>::type *; };
template <class R, class... A> struct Int<R (*)(A...), false> {
  using type = typename Int<R>::type (*)(typename Int<A>::type...);
};
";

#[test]
fn every_prototype_is_that_of_nccls_headers() {
    let mut program = String::from(INTS);
    for (symbol, arguments, returned) in PROTOTYPES {
        let arguments: Vec<_> = arguments.iter().map(|rust| c_type(rust)).collect();
        program += &format!(
            "static_assert(std::is_same_v<Int<decltype(&{symbol})>::type, {} (*)({})>, \
             \"{symbol}\");\n",
            c_type(returned),
            arguments.join(", ")
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let _ = compile(folder.path(), &program, &["-fsyntax-only"]);
}

/// Returns the names of functions in a header: identifiers with NCCL's prefix before a parenthesis,
/// outside comments and macros.
fn declared(header: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut rest = header.to_owned();
    while let Some(start) = rest.find("/*") {
        let end = rest[start..].find("*/").map_or(rest.len(), |end| start + end + 2);
        rest.replace_range(start..end, " ");
    }
    for line in rest.lines().map(|line| line.split("//").next().unwrap_or("")) {
        if line.trim_start().starts_with("#define") {
            continue;
        }
        for (at, _) in line.match_indices('(') {
            let before = line[..at].trim_end();
            let name = before.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').next();
            let name = name.filter(|name| name.starts_with("nccl"));
            names.extend(name.map(str::to_owned));
        }
    }
    names
}

fn table() -> BTreeSet<String> {
    PROTOTYPES.iter().map(|(symbol, ..)| (*symbol).to_owned()).collect()
}

#[test]
fn every_function_of_the_headers_is_in_the_table_or_left_out_for_a_reason() {
    let Some(include) = include() else { return };
    let mut names = BTreeSet::new();
    for header in ["nccl.h", "nccl_device/host.h"] {
        // The encoding of the headers does not matter: names are ASCII.
        let text = std::fs::read(include.join(header)).unwrap();
        names.extend(declared(&String::from_utf8_lossy(&text)));
    }
    let missing: Vec<_> = names.difference(&table()).cloned().collect();
    let left_out = LEFT_OUT.iter().filter(|(_, reason)| reason.starts_with("declared"));
    assert_eq!(missing, left_out.map(|(name, _)| *name).collect::<Vec<_>>());
    // The table has no other functions: its prototypes are compared with the headers.
    assert_eq!(names.len() - missing.len(), table().len());
}

#[test]
fn every_function_that_the_library_exports_is_in_the_table_or_left_out_for_a_reason() {
    let library = match Library::open(None) {
        Ok(library) if library.version() == DEV_COMM_VERSION => library,
        Ok(other) => return skip(&format!("{other:?} is of another version")),
        Err(error) => return skip(&error.to_string()),
    };
    let file = ReadCache::new(File::open(library.path()).unwrap());
    let object = object::File::parse(&file).unwrap();
    let exported: BTreeSet<String> = object
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .filter_map(|symbol| symbol.name().ok().map(str::to_owned))
        .filter(|name| name.starts_with("nccl"))
        .collect();
    let missing: Vec<_> = exported.difference(&table()).cloned().collect();
    let left_out = LEFT_OUT.iter().filter(|(_, reason)| !reason.contains("not exported"));
    assert_eq!(missing, left_out.map(|(name, _)| *name).collect::<Vec<_>>());
    let absent: Vec<_> = table().difference(&exported).cloned().collect();
    assert_eq!(absent, Vec::<String>::new());
}

//! The LLVM-C functions that the builder calls, loaded by name from the toolchain's library.
//!
//! A generated binding would pin one LLVM major; these signatures have been the same since LLVM 18.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

/// Any of LLVM's opaque handles.
pub(super) type Ref = *mut c_void;
/// LLVM's `LLVMBool`.
pub(super) type Bool = c_int;
/// The type of a diagnostic handler.
pub(super) type Handler = extern "C" fn(Ref, *mut c_void);

macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// One pointer per function, with LLVM's names.
        #[allow(non_snake_case)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Loads the library for the life of the process, with all functions.
            pub(super) fn load(path: &Path) -> Result<Self, libloading::Error> {
                // SAFETY: loading runs the library's initialisers. It is the LLVM of the toolchain
                // that compiles this build, and nothing else here initialises it.
                let library = unsafe { Library::new(path)? };
                let functions = Self {
                    // SAFETY: the signatures are those of LLVM's public C headers. The pointers
                    // stay valid because the library is never unloaded (`forget` below).
                    $($name: unsafe {
                        *library.get(concat!(stringify!($name), "\0").as_bytes())?
                    },)*
                };
                std::mem::forget(library);
                Ok(functions)
            }
        }
    };
}

functions! {
    LLVMGetVersion(*mut c_uint, *mut c_uint, *mut c_uint);
    LLVMInitializeNVPTXTargetInfo();
    LLVMInitializeNVPTXTarget();
    LLVMInitializeNVPTXTargetMC();
    LLVMInitializeNVPTXAsmPrinter();
    LLVMParseCommandLineOptions(c_int, *const *const c_char, *const c_char);
    LLVMDisposeMessage(*mut c_char);
    LLVMGetErrorMessage(Ref) -> *mut c_char;
    LLVMDisposeErrorMessage(*mut c_char);

    LLVMContextCreate() -> Ref;
    LLVMContextDispose(Ref);
    LLVMContextSetDiagnosticHandler(Ref, Handler, *mut c_void);
    LLVMGetDiagInfoDescription(Ref) -> *mut c_char;
    LLVMGetDiagInfoSeverity(Ref) -> c_int;

    LLVMCreateMemoryBufferWithContentsOfFile(*const c_char, *mut Ref, *mut *mut c_char) -> Bool;
    LLVMGetBufferStart(Ref) -> *const c_char;
    LLVMGetBufferSize(Ref) -> usize;
    LLVMDisposeMemoryBuffer(Ref);

    LLVMModuleCreateWithNameInContext(*const c_char, Ref) -> Ref;
    LLVMGetBitcodeModuleInContext2(Ref, Ref, *mut Ref) -> Bool;
    LLVMParseBitcodeInContext2(Ref, Ref, *mut Ref) -> Bool;
    LLVMDisposeModule(Ref);
    LLVMGetDataLayoutStr(Ref) -> *const c_char;
    LLVMSetDataLayout(Ref, *const c_char);
    LLVMSetTarget(Ref, *const c_char);
    LLVMSetSourceFileName(Ref, *const c_char, usize);
    LLVMSetModuleIdentifier(Ref, *const c_char, usize);
    LLVMLinkModules2(Ref, Ref) -> Bool;
    LLVMVerifyModule(Ref, c_int, *mut *mut c_char) -> Bool;
    LLVMWriteBitcodeToFile(Ref, *const c_char) -> c_int;
    LLVMPrintModuleToFile(Ref, *const c_char, *mut *mut c_char) -> Bool;

    LLVMGetTargetFromTriple(*const c_char, *mut Ref, *mut *mut c_char) -> Bool;
    LLVMCreateTargetMachine(Ref, *const c_char, *const c_char, *const c_char, c_int, c_int, c_int)
        -> Ref;
    LLVMDisposeTargetMachine(Ref);
    LLVMCreatePassBuilderOptions() -> Ref;
    LLVMDisposePassBuilderOptions(Ref);
    LLVMRunPasses(Ref, *const c_char, Ref, Ref) -> Ref;
    LLVMTargetMachineEmitToMemoryBuffer(Ref, Ref, c_int, *mut *mut c_char, *mut Ref) -> Bool;

    LLVMGetFirstFunction(Ref) -> Ref;
    LLVMGetNextFunction(Ref) -> Ref;
    LLVMGetFirstGlobal(Ref) -> Ref;
    LLVMGetNextGlobal(Ref) -> Ref;
    LLVMGetFirstGlobalAlias(Ref) -> Ref;
    LLVMGetNextGlobalAlias(Ref) -> Ref;
    LLVMGetFirstBasicBlock(Ref) -> Ref;
    LLVMGetNextBasicBlock(Ref) -> Ref;
    LLVMGetFirstInstruction(Ref) -> Ref;
    LLVMGetNextInstruction(Ref) -> Ref;
    LLVMGetFirstUse(Ref) -> Ref;
    LLVMGetNextUse(Ref) -> Ref;
    LLVMGetUser(Ref) -> Ref;

    LLVMGetValueName2(Ref, *mut usize) -> *const c_char;
    LLVMSetValueName2(Ref, *const c_char, usize);
    LLVMIsDeclaration(Ref) -> Bool;
    LLVMGetLinkage(Ref) -> c_int;
    LLVMSetLinkage(Ref, c_int);
    LLVMGetFunctionCallConv(Ref) -> c_uint;
    LLVMGetGlobalParent(Ref) -> Ref;
    LLVMGetSection(Ref) -> *const c_char;
    LLVMGetAlignment(Ref) -> c_uint;
    LLVMSetAlignment(Ref, c_uint);
    LLVMGetInitializer(Ref) -> Ref;
    LLVMSetInitializer(Ref, Ref);
    LLVMGlobalGetValueType(Ref) -> Ref;
    LLVMAddGlobalInAddressSpace(Ref, Ref, *const c_char, c_uint) -> Ref;
    LLVMReplaceAllUsesWith(Ref, Ref);
    LLVMConstAddrSpaceCast(Ref, Ref) -> Ref;
    LLVMTypeOf(Ref) -> Ref;
    LLVMGetUndef(Ref) -> Ref;
    LLVMGetReturnType(Ref) -> Ref;
    LLVMPrintTypeToString(Ref) -> *mut c_char;
    LLVMGetModuleDataLayout(Ref) -> Ref;
    LLVMABISizeOfType(Ref, Ref) -> u64;
    LLVMInt8TypeInContext(Ref) -> Ref;
    LLVMArrayType2(Ref, u64) -> Ref;

    LLVMIsAFunction(Ref) -> Ref;
    LLVMIsAInstruction(Ref) -> Ref;
    LLVMIsAGlobalVariable(Ref) -> Ref;
    LLVMIsAInlineAsm(Ref) -> Ref;
    LLVMGetInlineAsmHasSideEffects(Ref) -> Bool;
    LLVMIsAUser(Ref) -> Ref;
    LLVMGetTypeContext(Ref) -> Ref;
    LLVMIsAConstantInt(Ref) -> Ref;
    LLVMIsUndef(Ref) -> Bool;
    LLVMIsAConstantDataSequential(Ref) -> Ref;
    LLVMIsConstantString(Ref) -> Bool;
    LLVMGetAsString(Ref, *mut usize) -> *const c_char;
    LLVMConstIntGetSExtValue(Ref) -> i64;
    LLVMGetNumOperands(Ref) -> c_int;
    LLVMGetOperand(Ref, c_uint) -> Ref;
    LLVMHasPersonalityFn(Ref) -> Bool;
    LLVMSetPersonalityFn(Ref, Ref);
    LLVMCountParams(Ref) -> c_uint;
    LLVMGetParam(Ref, c_uint) -> Ref;
    LLVMGetInstructionOpcode(Ref) -> c_int;
    LLVMGetCalledValue(Ref) -> Ref;
    LLVMGetNumArgOperands(Ref) -> c_uint;
    LLVMGetGEPSourceElementType(Ref) -> Ref;
    LLVMGetTypeKind(Ref) -> c_int;
    LLVMGetIntTypeWidth(Ref) -> c_uint;

    LLVMInstructionGetDebugLoc(Ref) -> Ref;
    LLVMDILocationGetLine(Ref) -> c_uint;
    LLVMDILocationGetColumn(Ref) -> c_uint;
    LLVMDILocationGetScope(Ref) -> Ref;
    LLVMDILocationGetInlinedAt(Ref) -> Ref;
    LLVMGetSubprogram(Ref) -> Ref;
    LLVMDIScopeGetFile(Ref) -> Ref;
    LLVMDIFileGetDirectory(Ref, *mut c_uint) -> *const c_char;
    LLVMDIFileGetFilename(Ref, *mut c_uint) -> *const c_char;

    LLVMGetAllocatedType(Ref) -> Ref;
    LLVMIsAAllocaInst(Ref) -> Ref;
    LLVMInt64TypeInContext(Ref) -> Ref;
    LLVMPointerTypeInContext(Ref, c_uint) -> Ref;
    LLVMConstInt(Ref, u64, Bool) -> Ref;
    LLVMCreateBuilderInContext(Ref) -> Ref;
    LLVMDisposeBuilder(Ref);
    LLVMPositionBuilderBefore(Ref, Ref);
    LLVMBuildGEP2(Ref, Ref, Ref, *mut Ref, c_uint, *const c_char) -> Ref;
    LLVMBuildLoad2(Ref, Ref, Ref, *const c_char) -> Ref;
    LLVMBuildStore(Ref, Ref, Ref) -> Ref;
    LLVMInstructionEraseFromParent(Ref);
    LLVMGetMDKindIDInContext(Ref, *const c_char, c_uint) -> c_uint;
    LLVMSetMetadata(Ref, c_uint, Ref);

    LLVMGetEnumAttributeKindForName(*const c_char, usize) -> c_uint;
    LLVMGetEnumAttributeKind(Ref) -> c_uint;
    LLVMGetEnumAttributeAtIndex(Ref, c_uint, c_uint) -> Ref;
    LLVMGetEnumAttributeValue(Ref) -> u64;
    LLVMGetTypeAttributeValue(Ref) -> Ref;
    LLVMCreateEnumAttribute(Ref, c_uint, u64) -> Ref;
    LLVMCreateTypeAttribute(Ref, c_uint, Ref) -> Ref;
    LLVMCreateStringAttribute(Ref, *const c_char, c_uint, *const c_char, c_uint) -> Ref;
    LLVMAddAttributeAtIndex(Ref, c_uint, Ref);
    LLVMAddCallSiteAttribute(Ref, c_uint, Ref);
    LLVMRemoveCallSiteEnumAttribute(Ref, c_uint, c_uint);
    LLVMRemoveEnumAttributeAtIndex(Ref, c_uint, c_uint);
}

//! Names and texts of the driver's errors.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use devcomm_sys::driver::CUresult;
use litemap::LiteMap;
use parking_lot::Mutex;

use super::Refusal;

thread_local! {
    /// The last refusal of this thread that has a text of its own.
    static LAST: RefCell<Option<(CUresult, CString)>> = const { RefCell::new(None) };
}

/// Keeps the text of a refusal for whoever asks for the text of its code.
pub(super) fn remember(refusal: Refusal) {
    let text = refusal.text.map(|text| (refusal.code, c_string(&text)));
    let _ = LAST.try_with(|last| last.replace(text));
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// `CUDA_ERROR_NOT_READY`, kept for the life of the process.
fn name_of(error: CUresult) -> *const c_char {
    static NAMES: Mutex<LiteMap<u32, CString>> = Mutex::new(LiteMap::new());
    let mut names = NAMES.lock();
    // A name is never removed, and its bytes do not move with the map's entry.
    names.entry(error as u32).or_insert_with(|| c_string(&format!("{error:?}"))).as_ptr()
}

pub(super) unsafe fn error_name(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's pointer.
    unsafe { text.write(name_of(error)) };
    CUresult::CUDA_SUCCESS
}

/// The text of this thread's last refusal if it had that code, else the name. Valid until the
/// thread's next call.
pub(super) unsafe fn error_string(error: CUresult, text: *mut *const c_char) -> CUresult {
    let own = |last: &RefCell<Option<(CUresult, CString)>>| {
        let last = last.borrow();
        last.as_ref().filter(|(code, _)| *code == error).map(|(_, text)| text.as_ptr())
    };
    let own = LAST.try_with(own).ok().flatten();
    // SAFETY: the caller's pointer.
    unsafe { text.write(own.unwrap_or_else(|| name_of(error))) };
    CUresult::CUDA_SUCCESS
}

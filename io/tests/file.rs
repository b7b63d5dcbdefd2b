//! Reading what is read once: any offset, any length, whole or an error.

mod common;

use common::{Model, byte_at};
use millstream_io::{Access, FileId, IoError, IoMode};

#[test]
fn any_range_is_read_whole_in_every_mode() {
    let bytes = 100_003;
    let model = Model::new(&[10, bytes]);
    for mode in [IoMode::Auto, IoMode::Buffered] {
        let files = model.open(mode);
        assert_eq!((files.len(), files.len_bytes(FileId(1)), files.path(FileId(1))), (2, bytes, &*model.paths[1]));
        for (offset, len) in [(0, 0), (0, 1), (4095, 2), (1, 100_002), (bytes, 0), (bytes - 1, 1), (77, 8192)] {
            let mut buf = vec![0x5A; len];
            files.read_exact_at(FileId(1), offset, &mut buf).unwrap();
            assert!(buf.iter().zip(offset..).all(|(byte, at)| *byte == byte_at(1, at)), "{len} at {offset}");
        }
        let error = files.read_exact_at(FileId(1), bytes - 5, &mut [0; 20]).unwrap_err();
        let IoError::EndOfFile { range } = error else { panic!("{error:?}") };
        assert_eq!((range.offset, range.wanted, range.got), (bytes - 5, 20, 5));
        for (file, offset) in [(FileId(1), u64::MAX), (FileId(1), i64::MAX as u64), (FileId(2), 0)] {
            let error = files.read_exact_at(file, offset, &mut [0; 4]).unwrap_err();
            assert!(matches!(error, IoError::BadRequest { .. }), "{error:?}");
        }
    }
}

#[test]
fn the_description_groups_files_by_how_they_are_read() {
    let model = Model::new(&[10, 10, 10]);
    let lines = model.open(IoMode::Buffered).describe();
    assert_eq!(lines, ["part-0.bin and 2 more files: buffered, as asked"]);
    let files = model.open(IoMode::Auto);
    assert_eq!(files.describe().len(), 1);
    if let Access::Direct { mem_align, offset_align } = files.access(FileId(0)) {
        assert!(files.align() >= 4096 && files.align().is_multiple_of(*offset_align.max(mem_align)));
        assert!(files.describe()[0].contains("direct"));
    }
}

#[test]
fn links_lead_to_the_file_and_read_only_directories_are_fine() {
    use std::os::unix::fs::PermissionsExt;
    let model = Model::new(&[5000]);
    let link = model.dir.path().join("link.bin");
    std::os::unix::fs::symlink(&model.paths[0], &link).unwrap();
    let read_only = |mode| std::fs::set_permissions(model.dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    read_only(0o555);
    let files = millstream_io::FileSet::open(std::slice::from_ref(&link), IoMode::Auto).unwrap();
    let mut buf = [0; 5000];
    files.read_exact_at(FileId(0), 0, &mut buf).unwrap();
    assert!(buf.iter().zip(0..).all(|(byte, at)| *byte == byte_at(0, at)));
    files.check_unchanged().unwrap();
    read_only(0o755);
}

# Compresses the file IN and writes it to OUT as C: NAME_zst, its length NAME_zst_bytes, and NAME_bytes, the length of IN.
file(ARCHIVE_CREATE OUTPUT ${OUT}.zst PATHS ${IN} FORMAT raw COMPRESSION Zstd COMPRESSION_LEVEL 9)
file(READ ${OUT}.zst hex HEX)
file(SIZE ${IN} bytes)
string(LENGTH "${hex}" digits)
math(EXPR compressed "${digits} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
file(WRITE ${OUT} "#include <stddef.h>\n\nextern const size_t ${NAME}_bytes, ${NAME}_zst_bytes;\nextern const unsigned char ${NAME}_zst[];\n\nconst size_t ${NAME}_bytes = ${bytes}, ${NAME}_zst_bytes = ${compressed};\nconst unsigned char ${NAME}_zst[] = {\n${hex}\n};\n")

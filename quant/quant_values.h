/* The values of the constant tables of the quantizers, as exact hexadecimal floats.
 *
 * NF4 codes: bitsandbytes, get_4bit_type("nf4"). Thresholds: the constants of dQuantizeNF4 in its
 * CUDA kernel, rounded to float; 0, 8, 12 and 14 lie one ulp away from the float midpoints that its
 * CPU backend uses. Dynamic map: create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8)
 * with the FMA in linspace that x86 builds of PyTorch have; unit_quant_tables.c rebuilds it.
 *
 * They are macros, so that quant_tables.c and the CUDA kernels share one set. */
#ifndef QC_QUANT_QUANT_VALUES_H
#define QC_QUANT_QUANT_VALUES_H

#define QC_NF4_CODE_VALUES                                                                         \
    -0x1p+0f, -0x1.647362p-1f, -0x1.0cd66p-1f, -0x1.94654p-2f, -0x1.23449ap-2f, -0x1.7a6a7ep-3f,   \
        -0x1.74f0e2p-4f, 0.0f, 0x1.45f5fep-4f, 0x1.4995c6p-3f, 0x1.f809bap-3f, 0x1.5a0674p-2f,     \
        0x1.c3497p-2f, 0x1.200f56p-1f, 0x1.722766p-1f, 0x1p+0f

/* For the tensor-core paths of the kernels. Code values times the first number are rounded to
 * float16 with the least total error (least squares over floats in [1, 2)); their products are
 * multiplied by the second number, its inverse. unit_code_scale.c searches for it. */
#define QC_NF4_HALF_SCALE         0x1.ad7d1p+0f
#define QC_NF4_HALF_SCALE_INVERSE 0x1.312e7ep-1f

#define QC_NF4_THRESHOLD_VALUES                                                                    \
    -0x1.b239b2p-1f, -0x1.38a4ep-1f, -0x1.d709p-2f, -0x1.5bd4ecp-2f, -0x1.e079d8p-3f,              \
        -0x1.1a7178p-3f, -0x1.74f0e2p-5f, 0x1.45f5fep-5f, 0x1.ec90c6p-4f, 0x1.a0cfcp-3f,           \
        0x1.2b05a8p-2f, 0x1.8ea7f2p-2f, 0x1.00da06p-1f, 0x1.491b5ep-1f, 0x1.b913b2p-1f

#define QC_DYNAMIC_MAP_VALUES                                                                      \
    -0x1.fc6666p-1f, -0x1.f53334p-1f, -0x1.eep-1f, -0x1.e6ccccp-1f, -0x1.df999ap-1f,               \
        -0x1.d86666p-1f, -0x1.d13334p-1f, -0x1.cap-1f, -0x1.c2ccccp-1f, -0x1.bb999ap-1f,           \
        -0x1.b46666p-1f, -0x1.ad3334p-1f, -0x1.a6p-1f, -0x1.9eccccp-1f, -0x1.97999ap-1f,           \
        -0x1.906666p-1f, -0x1.893334p-1f, -0x1.82p-1f, -0x1.7accccp-1f, -0x1.73999ap-1f,           \
        -0x1.6c6668p-1f, -0x1.653334p-1f, -0x1.5ep-1f, -0x1.56ccccp-1f, -0x1.4f999ap-1f,           \
        -0x1.486668p-1f, -0x1.413334p-1f, -0x1.3ap-1f, -0x1.32ccccp-1f, -0x1.2b999ap-1f,           \
        -0x1.246668p-1f, -0x1.1d3334p-1f, -0x1.16p-1f, -0x1.0eccccp-1f, -0x1.079998p-1f,           \
        -0x1.006666p-1f, -0x1.f26664p-2f, -0x1.e4p-2f, -0x1.d59998p-2f, -0x1.c73334p-2f,           \
        -0x1.b8ccccp-2f, -0x1.aa6666p-2f, -0x1.9cp-2f, -0x1.8d9998p-2f, -0x1.7f3334p-2f,           \
        -0x1.70ccccp-2f, -0x1.626666p-2f, -0x1.54p-2f, -0x1.459998p-2f, -0x1.373334p-2f,           \
        -0x1.28ccccp-2f, -0x1.1a6668p-2f, -0x1.0cp-2f, -0x1.fb3332p-3f, -0x1.de6666p-3f,           \
        -0x1.c1999ap-3f, -0x1.a4ccccp-3f, -0x1.88p-3f, -0x1.6b3334p-3f, -0x1.4e6666p-3f,           \
        -0x1.31999ap-3f, -0x1.14ccccp-3f, -0x1.fp-4f, -0x1.b66668p-4f, -0x1.93d70ap-4f,            \
        -0x1.8851eep-4f, -0x1.7ccccep-4f, -0x1.7147aep-4f, -0x1.65c29p-4f, -0x1.5a3d7p-4f,         \
        -0x1.4eb854p-4f, -0x1.433334p-4f, -0x1.37ae14p-4f, -0x1.2c28f6p-4f, -0x1.20a3d6p-4f,       \
        -0x1.151ebap-4f, -0x1.09999ap-4f, -0x1.fc28f6p-5f, -0x1.e51ebap-5f, -0x1.ce147ap-5f,       \
        -0x1.b70a3ep-5f, -0x1.ap-5f, -0x1.88f5c2p-5f, -0x1.71eb86p-5f, -0x1.5ae146p-5f,            \
        -0x1.43d70ap-5f, -0x1.2ccccep-5f, -0x1.15c29p-5f, -0x1.fd70a4p-6f, -0x1.cf5c2ap-6f,        \
        -0x1.a147aep-6f, -0x1.733334p-6f, -0x1.451ebap-6f, -0x1.170a3ep-6f, -0x1.d1eb86p-7f,       \
        -0x1.75c29p-7f, -0x1.3e76c8p-7f, -0x1.2c083p-7f, -0x1.19999ap-7f, -0x1.072b02p-7f,         \
        -0x1.e978d4p-8f, -0x1.c49ba6p-8f, -0x1.9fbe76p-8f, -0x1.7ae148p-8f, -0x1.56041ap-8f,       \
        -0x1.3126e8p-8f, -0x1.0c49bap-8f, -0x1.ced914p-9f, -0x1.851eb8p-9f, -0x1.3b645ap-9f,       \
        -0x1.e353f8p-10f, -0x1.4fdf3ap-10f, -0x1.eecbfep-11f, -0x1.b3d07cp-11f, -0x1.78d5p-11f,    \
        -0x1.3dd982p-11f, -0x1.02de02p-11f, -0x1.8fc506p-12f, -0x1.19ce0ap-12f, -0x1.47ae16p-13f,  \
        -0x1.743e96p-14f, -0x1.15df66p-14f, -0x1.6f0068p-15f, -0x1.64840cp-16f, -0x1.040bfep-17f,  \
        -0x1.b43528p-19f, -0x1.27476ep-21f, 0.0f, 0x1.27476ep-21f, 0x1.b43528p-19f,                \
        0x1.040bfep-17f, 0x1.64840cp-16f, 0x1.6f0068p-15f, 0x1.15df66p-14f, 0x1.743e96p-14f,       \
        0x1.47ae16p-13f, 0x1.19ce0ap-12f, 0x1.8fc506p-12f, 0x1.02de02p-11f, 0x1.3dd982p-11f,       \
        0x1.78d5p-11f, 0x1.b3d07cp-11f, 0x1.eecbfep-11f, 0x1.4fdf3ap-10f, 0x1.e353f8p-10f,         \
        0x1.3b645ap-9f, 0x1.851eb8p-9f, 0x1.ced914p-9f, 0x1.0c49bap-8f, 0x1.3126e8p-8f,            \
        0x1.56041ap-8f, 0x1.7ae148p-8f, 0x1.9fbe76p-8f, 0x1.c49ba6p-8f, 0x1.e978d4p-8f,            \
        0x1.072b02p-7f, 0x1.19999ap-7f, 0x1.2c083p-7f, 0x1.3e76c8p-7f, 0x1.75c29p-7f,              \
        0x1.d1eb86p-7f, 0x1.170a3ep-6f, 0x1.451ebap-6f, 0x1.733334p-6f, 0x1.a147aep-6f,            \
        0x1.cf5c2ap-6f, 0x1.fd70a4p-6f, 0x1.15c29p-5f, 0x1.2ccccep-5f, 0x1.43d70ap-5f,             \
        0x1.5ae146p-5f, 0x1.71eb86p-5f, 0x1.88f5c2p-5f, 0x1.ap-5f, 0x1.b70a3ep-5f, 0x1.ce147ap-5f, \
        0x1.e51ebap-5f, 0x1.fc28f6p-5f, 0x1.09999ap-4f, 0x1.151ebap-4f, 0x1.20a3d6p-4f,            \
        0x1.2c28f6p-4f, 0x1.37ae14p-4f, 0x1.433334p-4f, 0x1.4eb854p-4f, 0x1.5a3d7p-4f,             \
        0x1.65c29p-4f, 0x1.7147aep-4f, 0x1.7ccccep-4f, 0x1.8851eep-4f, 0x1.93d70ap-4f,             \
        0x1.b66668p-4f, 0x1.fp-4f, 0x1.14ccccp-3f, 0x1.31999ap-3f, 0x1.4e6666p-3f, 0x1.6b3334p-3f, \
        0x1.88p-3f, 0x1.a4ccccp-3f, 0x1.c1999ap-3f, 0x1.de6666p-3f, 0x1.fb3332p-3f, 0x1.0cp-2f,    \
        0x1.1a6668p-2f, 0x1.28ccccp-2f, 0x1.373334p-2f, 0x1.459998p-2f, 0x1.54p-2f,                \
        0x1.626666p-2f, 0x1.70ccccp-2f, 0x1.7f3334p-2f, 0x1.8d9998p-2f, 0x1.9cp-2f,                \
        0x1.aa6666p-2f, 0x1.b8ccccp-2f, 0x1.c73334p-2f, 0x1.d59998p-2f, 0x1.e4p-2f,                \
        0x1.f26664p-2f, 0x1.006666p-1f, 0x1.079998p-1f, 0x1.0eccccp-1f, 0x1.16p-1f,                \
        0x1.1d3334p-1f, 0x1.246668p-1f, 0x1.2b999ap-1f, 0x1.32ccccp-1f, 0x1.3ap-1f,                \
        0x1.413334p-1f, 0x1.486668p-1f, 0x1.4f999ap-1f, 0x1.56ccccp-1f, 0x1.5ep-1f,                \
        0x1.653334p-1f, 0x1.6c6668p-1f, 0x1.73999ap-1f, 0x1.7accccp-1f, 0x1.82p-1f,                \
        0x1.893334p-1f, 0x1.906666p-1f, 0x1.97999ap-1f, 0x1.9eccccp-1f, 0x1.a6p-1f,                \
        0x1.ad3334p-1f, 0x1.b46666p-1f, 0x1.bb999ap-1f, 0x1.c2ccccp-1f, 0x1.cap-1f,                \
        0x1.d13334p-1f, 0x1.d86666p-1f, 0x1.df999ap-1f, 0x1.e6ccccp-1f, 0x1.eep-1f,                \
        0x1.f53334p-1f, 0x1.fc6666p-1f, 0x1p+0f

#define QC_DYNAMIC_THRESHOLD_VALUES                                                                \
    -0x1.f8ccccp-1f, -0x1.f1999cp-1f, -0x1.ea6666p-1f, -0x1.e33336p-1f, -0x1.dcp-1f,               \
        -0x1.d4cccep-1f, -0x1.cd999ap-1f, -0x1.c66668p-1f, -0x1.bf3334p-1f, -0x1.b80002p-1f,       \
        -0x1.b0ccccp-1f, -0x1.a9999cp-1f, -0x1.a26666p-1f, -0x1.9b3336p-1f, -0x1.94p-1f,           \
        -0x1.8ccccep-1f, -0x1.85999ap-1f, -0x1.7e6668p-1f, -0x1.773334p-1f, -0x1.700002p-1f,       \
        -0x1.68cccep-1f, -0x1.61999cp-1f, -0x1.5a6666p-1f, -0x1.533336p-1f, -0x1.4cp-1f,           \
        -0x1.44ccdp-1f, -0x1.3d999ap-1f, -0x1.366668p-1f, -0x1.2f3334p-1f, -0x1.280002p-1f,        \
        -0x1.20cccep-1f, -0x1.19999cp-1f, -0x1.126666p-1f, -0x1.0b3334p-1f, -0x1.04p-1f,           \
        -0x1.f9999ap-2f, -0x1.eb3332p-2f, -0x1.dccccep-2f, -0x1.ce6666p-2f, -0x1.c00002p-2f,       \
        -0x1.b19998p-2f, -0x1.a33336p-2f, -0x1.94ccccp-2f, -0x1.866668p-2f, -0x1.78p-2f,           \
        -0x1.69999ap-2f, -0x1.5b3334p-2f, -0x1.4ccccep-2f, -0x1.3e6666p-2f, -0x1.300002p-2f,       \
        -0x1.21999ap-2f, -0x1.133336p-2f, -0x1.04ccccp-2f, -0x1.eccccep-3f, -0x1.dp-3f,            \
        -0x1.b33336p-3f, -0x1.966666p-3f, -0x1.79999cp-3f, -0x1.5cccccp-3f, -0x1.400002p-3f,       \
        -0x1.233334p-3f, -0x1.066668p-3f, -0x1.d33334p-4f, -0x1.a51ebap-4f, -0x1.8e147cp-4f,       \
        -0x1.828f6p-4f, -0x1.770a3ep-4f, -0x1.6b8522p-4f, -0x1.6p-4f, -0x1.547ae4p-4f,             \
        -0x1.48f5c4p-4f, -0x1.3d70a6p-4f, -0x1.31eb84p-4f, -0x1.266668p-4f, -0x1.1ae148p-4f,       \
        -0x1.0f5c2cp-4f, -0x1.03d70ap-4f, -0x1.f0a3dap-5f, -0x1.d9999ap-5f, -0x1.c28f5ep-5f,       \
        -0x1.ab852p-5f, -0x1.947ae2p-5f, -0x1.7d70a4p-5f, -0x1.666668p-5f, -0x1.4f5c28p-5f,        \
        -0x1.3851eep-5f, -0x1.2147bp-5f, -0x1.0a3d72p-5f, -0x1.e66668p-6f, -0x1.b851eep-6f,        \
        -0x1.8a3d7p-6f, -0x1.5c28fap-6f, -0x1.2e147cp-6f, -0x1.000002p-6f, -0x1.a3d70cp-7f,        \
        -0x1.5a1caep-7f, -0x1.353f7cp-7f, -0x1.22d0e6p-7f, -0x1.10624ep-7f, -0x1.fbe76ep-8f,       \
        -0x1.d70a3cp-8f, -0x1.b22d1p-8f, -0x1.8d4fep-8f, -0x1.6872b2p-8f, -0x1.43958p-8f,          \
        -0x1.1eb852p-8f, -0x1.f3b644p-9f, -0x1.a9fbe8p-9f, -0x1.604188p-9f, -0x1.16872ep-9f,       \
        -0x1.999998p-10f, -0x1.23a29ep-10f, -0x1.d14e3cp-11f, -0x1.9652cp-11f, -0x1.5b574p-11f,    \
        -0x1.205bc4p-11f, -0x1.cac084p-12f, -0x1.54c98ap-12f, -0x1.bda514p-13f, -0x1.00e6b2p-13f,  \
        -0x1.450efep-14f, -0x1.cd5f9cp-15f, -0x1.10a138p-15f, -0x1.e68a0ep-17f, -0x1.711948p-18f,  \
        -0x1.fe0706p-20f, -0x1.27476ep-22f, 0x1.27476cp-22f, 0x1.fe0704p-20f, 0x1.711946p-18f,     \
        0x1.e68a0cp-17f, 0x1.10a136p-15f, 0x1.cd5f9ap-15f, 0x1.450efcp-14f, 0x1.00e6bp-13f,        \
        0x1.bda512p-13f, 0x1.54c988p-12f, 0x1.cac082p-12f, 0x1.205bc2p-11f, 0x1.5b573ep-11f,       \
        0x1.9652bep-11f, 0x1.d14e3ap-11f, 0x1.23a29cp-10f, 0x1.999996p-10f, 0x1.16872cp-9f,        \
        0x1.604186p-9f, 0x1.a9fbe6p-9f, 0x1.f3b642p-9f, 0x1.1eb85p-8f, 0x1.43957ep-8f,             \
        0x1.6872bp-8f, 0x1.8d4fdep-8f, 0x1.b22d0ep-8f, 0x1.d70a3ap-8f, 0x1.fbe76cp-8f,             \
        0x1.10624cp-7f, 0x1.22d0e4p-7f, 0x1.353f7ap-7f, 0x1.5a1cacp-7f, 0x1.a3d70ap-7f, 0x1p-6f,   \
        0x1.2e147ap-6f, 0x1.5c28f8p-6f, 0x1.8a3d6ep-6f, 0x1.b851ecp-6f, 0x1.e66666p-6f,            \
        0x1.0a3d7p-5f, 0x1.2147aep-5f, 0x1.3851ecp-5f, 0x1.4f5c26p-5f, 0x1.666666p-5f,             \
        0x1.7d70a2p-5f, 0x1.947aep-5f, 0x1.ab851ep-5f, 0x1.c28f5cp-5f, 0x1.d99998p-5f,             \
        0x1.f0a3d8p-5f, 0x1.03d708p-4f, 0x1.0f5c2ap-4f, 0x1.1ae146p-4f, 0x1.266666p-4f,            \
        0x1.31eb82p-4f, 0x1.3d70a4p-4f, 0x1.48f5c2p-4f, 0x1.547ae2p-4f, 0x1.5ffffep-4f,            \
        0x1.6b852p-4f, 0x1.770a3cp-4f, 0x1.828f5ep-4f, 0x1.8e147ap-4f, 0x1.a51eb8p-4f,             \
        0x1.d33332p-4f, 0x1.066666p-3f, 0x1.233332p-3f, 0x1.4p-3f, 0x1.5ccccap-3f, 0x1.79999ap-3f, \
        0x1.966664p-3f, 0x1.b33334p-3f, 0x1.cffffep-3f, 0x1.ecccccp-3f, 0x1.04cccap-2f,            \
        0x1.133334p-2f, 0x1.219998p-2f, 0x1.3p-2f, 0x1.3e6664p-2f, 0x1.4cccccp-2f, 0x1.5b3332p-2f, \
        0x1.699998p-2f, 0x1.77fffep-2f, 0x1.866666p-2f, 0x1.94cccap-2f, 0x1.a33334p-2f,            \
        0x1.b19996p-2f, 0x1.cp-2f, 0x1.ce6664p-2f, 0x1.dcccccp-2f, 0x1.eb333p-2f, 0x1.f99998p-2f,  \
        0x1.03fffep-1f, 0x1.0b3332p-1f, 0x1.126664p-1f, 0x1.19999ap-1f, 0x1.20ccccp-1f,            \
        0x1.28p-1f, 0x1.2f3332p-1f, 0x1.366666p-1f, 0x1.3d9998p-1f, 0x1.44cccep-1f,                \
        0x1.4bfffep-1f, 0x1.533334p-1f, 0x1.5a6664p-1f, 0x1.61999ap-1f, 0x1.68ccccp-1f, 0x1.7p-1f, \
        0x1.773332p-1f, 0x1.7e6666p-1f, 0x1.859998p-1f, 0x1.8cccccp-1f, 0x1.93fffep-1f,            \
        0x1.9b3334p-1f, 0x1.a26664p-1f, 0x1.a9999ap-1f, 0x1.b0cccap-1f, 0x1.b8p-1f,                \
        0x1.bf3332p-1f, 0x1.c66666p-1f, 0x1.cd9998p-1f, 0x1.d4ccccp-1f, 0x1.dbfffep-1f,            \
        0x1.e33334p-1f, 0x1.ea6664p-1f, 0x1.f1999ap-1f, 0x1.f8cccap-1f, 0x1.fe3334p-1f

#endif
